"""The engines under a communicator, one class each: see `collectives.backends.base` for what an engine offers."""
