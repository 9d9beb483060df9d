"""What a run is judged by: figures, thresholds, what maps and answers look at, tables, plots. Values in, values out."""
