"""Checks of a device: does it work, is it fast enough, is anything out of order?"""
