"""Groups of flags of `twostroke serve`: what each adds, and the config that comes of it."""
