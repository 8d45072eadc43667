"""What a model, a link and a route cost: facts and fits, before anything runs."""
