"""Processes of a pool of rewards: `processes` (which ones, and what they load), `lateness` (words about slow calls),
`printed` (text that functions print)."""
