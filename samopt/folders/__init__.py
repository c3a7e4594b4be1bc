"""Folders of images, many GPUs, many machines: `segment` and `embed`, and what they write.

inputs        which images are meant            prompts_file  prompts of COCO, CSV and JSON files
job           the output folder and its shards  reading       images, read ahead by threads
tasks         what is found out of pictures     worker        a task on a batch; smaller ones without memory
pipeline      shards through all of it          engine        here, or through Ray (ray_engine)
records       shards of masks: Parquet          embeddings    shards of embeddings: safetensors
exports       COCO JSON, label maps, overlays   summary       what became of the images
"""

from samopt.folders.embeddings import load_embedding
from samopt.folders.run import embed, segment
from samopt.folders.summary import Summary

__all__ = ["Summary", "embed", "load_embedding", "segment"]
