"""Verification of forecasts against the truth, by the definitions of WeatherBench 2."""
