"""Figures: what each claim in the README rests on, measured again on this machine."""
