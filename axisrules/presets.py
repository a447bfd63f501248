"""Presets. (in work)"""
