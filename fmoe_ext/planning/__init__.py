"""Plan a run before it starts (layouts of a model, policies of a layer), and place experts anew while it trains."""
