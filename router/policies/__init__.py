"""The routing policies, one a file: pure functions of (request, view, config, random source) that score all candidates."""
