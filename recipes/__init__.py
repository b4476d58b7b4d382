"""OSW-FT inside other codebases, and the methods beside it; each recipe is tested against ours."""
