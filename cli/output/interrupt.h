/* SIGINT, SIGTERM and SIGHUP during writing: clean up before exiting. */
#ifndef CLI_INTERRUPT_H
#define CLI_INTERRUPT_H

/*
 * From now on the first of these signals is only recorded. Long operations check cli_interrupted(), remove what they
 * have written, and the command exits with 128 + the signal. A second signal kills. Signals that were ignored (nohup)
 * stay ignored.
 */
void cli_interrupt_catch(void);
/* Returns the signal that asked to stop, or 0. */
int cli_interrupted(void);

#endif
