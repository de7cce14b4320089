"""The `kvatlas` command. Nothing here imports ray, torch or transformers at import: `--help` must be instant."""
