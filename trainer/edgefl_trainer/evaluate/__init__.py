"""What a run is judged by: figures per site, calibration, probes, baseline rows, tables. Values in, values out."""
