"""The product: configuration, HTTP API, command line, Serve application, benchmarks."""
