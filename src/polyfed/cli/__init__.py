"""The command line: parses, calls the API, prints."""
