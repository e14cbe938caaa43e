"""Problems of mathematics with true answers: arithmetic, GSM8K, Reasoning Gym."""
