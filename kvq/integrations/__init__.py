"""Where kvq meets other packages; each module imports its package when it is called."""
