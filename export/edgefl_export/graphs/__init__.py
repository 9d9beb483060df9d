"""A network or one of its training steps, traced to one self-contained ONNX file."""
