"""The OpenAI-compatible HTTP edge: validate, tokenize once, stream. Start at `app.build_app`."""
