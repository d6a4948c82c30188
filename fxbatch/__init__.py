"""fxbatch: write the model for one instance, run it on a minibatch."""
