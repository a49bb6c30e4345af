"""kvferry.workers"""
