"""kvferry.loadgen"""
