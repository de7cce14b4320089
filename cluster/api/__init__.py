"""The OpenAI-compatible HTTP application. `cluster.api.app.build_app` makes it; it knows neither Ray nor torch."""
