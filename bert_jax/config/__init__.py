"""What a run is: frozen dataclasses, presets by name, strict reading and writing."""
