"""Trainings on the workers of Ray Train."""
