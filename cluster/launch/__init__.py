"""`twostroke serve`: the launcher starts routers, Ray and the supervisor, waits, and removes everything afterwards."""
