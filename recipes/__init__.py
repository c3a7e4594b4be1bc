"""The recipes that come with samopt, one TOML file each."""
