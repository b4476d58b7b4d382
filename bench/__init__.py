"""What each part costs next to what one would use instead; and a plan: does a run fit?"""
