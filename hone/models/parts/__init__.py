"""Parts of weights: boxes of a tensor (`boxes`), tensors that record which box of them is read
(`views`), and where boxes of converted weights come from (`sources`)."""
