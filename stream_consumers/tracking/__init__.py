"""Consumers that track which messages were finished and commit behind them (Faust's consumer)."""
