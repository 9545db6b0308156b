"""Why a model says what it says about a slide: scores of tiles, heads with their radii, the posterior of a tile."""
