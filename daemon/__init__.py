"""kvferry.daemon"""
