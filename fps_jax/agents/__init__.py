"""How the pieces make one update: pure, for one device, collectives by axis_name."""
