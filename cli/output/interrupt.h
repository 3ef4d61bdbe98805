/* SIGINT, SIGTERM and SIGHUP while something is being written: finish tidily instead of dying on the spot. */
#ifndef CLI_INTERRUPT_H
#define CLI_INTERRUPT_H

/*
 * From now on the first of these signals is only remembered; what is being done looks at cli_interrupted() now and then,
 * removes what it has written so far, and the command exits with 128 + the signal. A second one kills. Signals that were
 * ignored (nohup) stay ignored.
 */
void cli_interrupt_catch(void);
/* The signal that asked to stop, or 0. */
int cli_interrupted(void);

#endif
