"""kvferry.radix"""
