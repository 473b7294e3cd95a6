"""Rows: runs of a grid or an atlas. What is asked of one, its process and stages, the schedule, where rows run."""
