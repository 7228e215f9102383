"""The step of a model, and what makes steps of models and of replica code."""
