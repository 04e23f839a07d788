"""Several processes that train one model in step."""
