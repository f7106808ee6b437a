"""Small models and runners that engine tests are made of."""
