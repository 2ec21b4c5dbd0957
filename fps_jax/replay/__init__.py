"""Where experience lives: storage, samplers and priorities, all of them arrays."""
