"""Plan a run before it starts: layouts of a model, policies of a layer; place experts by their load."""
