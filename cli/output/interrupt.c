#include "cli/output/interrupt.h"

#include <signal.h>
#include <stddef.h>

/* A global variable, since a signal handler can write nowhere else. */
static volatile sig_atomic_t caught;

static void on_signal(int number) {
    caught = number;
}

void cli_interrupt_catch(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
        struct sigaction old;
        struct sigaction new = {.sa_handler = on_signal, .sa_flags = SA_RESTART | (int)SA_RESETHAND};
        if (sigaction(signals[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN) {
            sigaction(signals[i], &new, NULL);
        }
    }
}

int cli_interrupted(void) {
    return caught;
}
