"""The report: one self-contained HTML page made from the files of runs and reproductions, without torch."""
