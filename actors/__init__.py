"""One replica: requests in, tokens out, computed over a pool of blocks.

Import the module you need: `actors.request` and `actors.config` are plain values, `actors.replica` brings torch and
transformers.
"""
