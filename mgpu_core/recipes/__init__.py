"""Trainings on real data, each to be started by one command, and to be read as a tutorial."""
