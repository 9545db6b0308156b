"""Past one machine: jobs and the search for settings on a Ray cluster (extra ``psamil[cluster]``)."""
