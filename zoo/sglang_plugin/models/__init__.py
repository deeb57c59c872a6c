"""EntryClass per architecture, registered with SGLang's ModelRegistry in a scheduler that was started with the zoo's backend."""
