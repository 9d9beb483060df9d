"""What a run is judged by: figures per site, calibration, probes, baseline rows, tables. Pure: values in, values out."""
