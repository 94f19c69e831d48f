"""What a model is: from config.json to layers, weights and sizes."""
