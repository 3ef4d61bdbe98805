/* The loop: choose a checkpoint, start the command, wait, record how it ended, decide. */
#include "supervise/supervise.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "supervise/internal.h"

#define FREE_MIN ((uint64_t)1 << 20)

typedef struct supervisor {
    supervise_options options;
    char store[4096]; /* absolute: the command may change its folder */
    journal journal;
    attempt_list history; /* of the run; the last one is in progress, or has ended */
    uint64_t started_here;
    candidates seen; /* checkpoints at the start of the last attempt */
    devices devices;
    anomalies anomalies;
    sigset_t taken, before;
    int signals;    /* a signalfd */
    int stopped_by; /* the first signal that asked to stop */
} supervisor;

/* ------------------------------------------------------------------------------------------------------ signals */

/*
 * Signals that were ignored when the supervisor started stay ignored: nohup relies on it. SIGPIPE is blocked, because
 * the command must not be lost when the reader of the messages goes away. It is blocked rather than ignored, because
 * children get the old mask back.
 */
static ckd_status take_signals(supervisor *s, ckd_error *err) {
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1};
    sigemptyset(&s->taken);
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        struct sigaction action;
        if (sigaction(numbers[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN) {
            sigaddset(&s->taken, numbers[i]);
        }
    }
    signal(SIGCHLD, SIG_DFL);
    sigset_t blocked = s->taken;
    sigaddset(&blocked, SIGPIPE);
    sigprocmask(SIG_BLOCK, &blocked, &s->before);
    s->signals = signalfd(-1, &s->taken, SFD_CLOEXEC | SFD_NONBLOCK);
    return s->signals >= 0 ? CKD_OK : supervise_error_sys(err, errno, "cannot take signals");
}

/* The next signal that has arrived; 0: none. */
static int next_signal(supervisor *s) {
    struct signalfd_siginfo info;
    if (read(s->signals, &info, sizeof(info)) != sizeof(info)) {
        return 0;
    }
    int number = (int)info.ssi_signo;
    if (number != SIGUSR1 && !s->stopped_by) {
        s->stopped_by = number;
    }
    return number;
}

static bool stop_asked(supervisor *s) {
    while (next_signal(s)) {
    }
    return s->stopped_by != 0;
}

static int cancel_if_stopped(void *context, uint64_t done, uint64_t total) {
    (void)done;
    (void)total;
    return stop_asked(context);
}

/* ----------------------------------------------------------------------------------------------------- attempts */

static attempt *last_attempt(supervisor *s) {
    return &s->history.items[s->history.count - 1];
}

static ckd_status add_attempt(supervisor *s, ckd_error *err) {
    attempt *grown = realloc(s->history.items, (s->history.count + 1) * sizeof(*grown));
    if (!grown) {
        return supervise_error(err, CKD_E_NOMEM, "out of memory");
    }
    s->history.items = grown;
    attempt *a = &grown[s->history.count++];
    *a = (attempt){.number = s->history.count > 1 ? grown[s->history.count - 2].number + 1 : 1,
                   .supervisor = getpid(),
                   .start_ns = supervise_now(),
                   .from_step = SUPERVISE_NO_STEP,
                   .first_step = candidates_top(&s->seen),
                   .last_step = SUPERVISE_NO_STEP,
                   .first_trained = SUPERVISE_NO_STEP,
                   .last_trained = SUPERVISE_NO_STEP,
                   .alarm_step = SUPERVISE_NO_STEP,
                   .reached = SUPERVISE_NO_STEP,
                   .status = -1};
    if (s->history.count > 1) { /* an attempt without a step has not repeated the steps lost before it */
        const attempt *before = a - 1;
        a->reached = before->last_trained != SUPERVISE_NO_STEP ? before->last_trained : before->reached;
    }
    snprintf(a->run, sizeof(a->run), "%s", s->options.run);
    gethostname(a->host, sizeof(a->host) - 1);
    snprintf(a->suspect, sizeof(a->suspect), "%s", s->seen.suspect);
    if (s->seen.chosen != SIZE_MAX) {
        candidate_ref(a->from, &s->seen.items[s->seen.chosen]);
        a->from_step = s->seen.items[s->seen.chosen].step;
    }
    return CKD_OK;
}

static void set_or_unset(const char *name, const char *value) {
    if (value) {
        setenv(name, value, 1);
    } else {
        unsetenv(name);
    }
}

/* The command is started with this environment. */
static void set_environment(const supervisor *s, const attempt *a) {
    char step[24], number[24];
    bool from = a->from[0] != '\0';
    snprintf(step, sizeof(step), "%" PRIu64, a->from_step);
    snprintf(number, sizeof(number), "%" PRIu64, a->number);
    set_or_unset("CKPTDELTA_STORE", s->store);
    set_or_unset("CKPTDELTA_RUN", a->run);
    set_or_unset("CKPTDELTA_STEP", from ? step : NULL);
    set_or_unset("CKPTDELTA_CHECKPOINT", from ? a->from : NULL);
    set_or_unset("CKPTDELTA_ATTEMPT", number);
}

/* Lists the checkpoints again, and keeps the marks of those found damaged. Returns false if it cannot list them. */
static bool look_again(candidates *now, const supervisor *s) {
    ckd_error why;
    if (candidates_read(now, s->store, s->options.run, &why) != CKD_OK) {
        supervise_say(&s->options, "cannot list the checkpoints: %s", why.message);
        return false;
    }
    for (size_t i = 0; i < now->count; i++) {
        for (size_t j = 0; j < s->seen.count; j++) {
            bool same = memcmp(&now->items[i].id, &s->seen.items[j].id, sizeof(ckd_id)) == 0;
            now->damaged[i] = now->damaged[i] || (same && s->seen.damaged[j]);
        }
    }
    return true;
}

/*
 * Records the checkpoints that the attempt has left behind. before: those at its start; NULL: not known. `older`: is
 * there another one to start from?
 */
static void take_stock(supervisor *s, attempt *a, const candidates *before, bool *older) {
    candidates now;
    *older = false;
    a->last_step = a->first_step;
    if (!look_again(&now, s)) {
        return;
    }
    anomalies_look(&s->anomalies, &now);
    const ckd_checkpoint *first = candidates_first_new(&now, before, a->start_ns);
    a->first_save_ns = !first                             ? 0
                       : first->created_ns >= a->start_ns ? first->created_ns - a->start_ns + 1
                                                          : 1;
    a->last_step = candidates_top(&now);
    *older = candidates_has_other(&now, a->from);
    candidates_free(&now);
}

/* Returns when the time is up, or at once if a signal asks to stop. */
static void pause_for(supervisor *s, double seconds) {
    uint64_t until = supervise_monotonic() + (uint64_t)(seconds * (double)SECOND);
    for (uint64_t now; !stop_asked(s) && (now = supervise_monotonic()) < until;) {
        uint64_t left_ms = (until - now) / 1000000 + 1;
        struct pollfd polled = {s->signals, POLLIN, 0};
        poll(&polled, 1, left_ms < 1000 ? (int)left_ms : 1000);
    }
}

/*
 * If the keeper was killed with the supervisor, the command may still run: it was only told to end. Two commands must
 * not train the same run.
 */
static ckd_status wait_for_leftover(supervisor *s, const attempt *a, ckd_error *err) {
    uint64_t until = supervise_monotonic() + (s->options.grace_s + 10) * SECOND;
    bool reported = false;
    for (pid_t pid; !stop_asked(s) && (pid = process_of_attempt(s->store, a->run, a->number));) {
        if (supervise_monotonic() > until) {
            return supervise_error(err, CKD_E_BUSY,
                                   "attempt %" PRIu64
                                   " of %s still runs as process %d, but its supervisor is "
                                   "gone: end that process first",
                                   a->number, a->run, (int)pid);
        }
        if (!reported) {
            supervise_say(&s->options,
                          "waiting for attempt %" PRIu64 ", which still runs as process %d, to end",
                          a->number, (int)pid);
        }
        reported = true;
        pause_for(s, 0.2);
    }
    return CKD_OK;
}

/* The journal shows an attempt without an end: its supervisor was killed, or its machine went down. */
static ckd_status close_unfinished(supervisor *s, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; status == CKD_OK && i < s->history.count; i++) {
        attempt *a = &s->history.items[i];
        bool older;
        if (a->end != ATTEMPT_RUNNING) {
            continue;
        }
        status = wait_for_leftover(s, a, err);
        if (status != CKD_OK || stop_asked(s)) {
            return status;
        }
        take_stock(s, a, NULL, &older);
        a->end = ATTEMPT_LOST;
        a->end_ns = supervise_now();
        decide_reason(a->reason, a);
        snprintf(a->verdict, sizeof(a->verdict), "goes on");
        supervise_say(&s->options, "attempt %" PRIu64 " has no end in the journal: its supervisor died",
                      a->number);
        status = journal_end(&s->journal, a, err);
    }
    return status;
}

/* Reports when the command hangs, and ends it once stack traces were taken. */
static void look_for_a_hang(const supervisor *s, process *p, attempt *a, watch *w) {
    char what[SUPERVISE_TEXT_MAX];
    switch (s->stopped_by ? WATCH_NOTHING : watch_look(w, a->hang)) {
    case WATCH_HUNG:
        a->hung = true;
        supervise_say(&s->options, "attempt %" PRIu64 " is hung: %s", a->number, a->hang);
        break;
    case WATCH_SUSPECT:
        anomalies_reason(what, &s->anomalies);
        supervise_say(&s->options, "attempt %" PRIu64 " is ended, as %s", a->number, what);
        process_signal(p, SIGTERM, true);
        break;
    case WATCH_END:
        process_signal(p, SIGTERM, true);
        break;
    case WATCH_NOTHING:
        break;
    }
    if (!a->hung) {
        a->hang[0] = '\0';
    }
}

/* Waits for the command and passes signals on to it. */
static process_end wait_for(supervisor *s, process *p, attempt *a, watch *w) {
    process_end end = {0};
    for (;;) {
        struct pollfd polled[] = {{p->socket, POLLIN, 0}, {s->signals, POLLIN, 0}};
        if (poll(polled, 2, s->stopped_by ? -1 : watch_wait_ms(w)) < 0) {
            continue;
        }
        look_for_a_hang(s, p, a, w);
        for (int number; polled[1].revents && (number = next_signal(s));) {
            supervise_say(&s->options, "%s is passed on to attempt %" PRIu64, signal_text_of(number).text,
                          a->number);
            process_signal(p, number, number != SIGUSR1);
            a->stopped_by = s->stopped_by;
        }
        if (polled[0].revents && process_ended(&end, p)) {
            return end;
        }
    }
}

/* Takes the alarms that were raised just before the end. */
static void look_at_last_alarms(supervisor *s, const progress *steps) {
    ckd_progress_slot *slots = calloc(PROGRESS_SLOTS, sizeof(*slots));
    if (slots) {
        anomalies_look_at_slots(&s->anomalies, slots, progress_read(slots, steps));
    }
    free(slots);
}

/* Attends to the started command. Returns how it ended. */
static process_end attend(supervisor *s, process *p, attempt *a, const progress *steps) {
    uint64_t begun = supervise_monotonic();
    watch *w = watch_new(&(watch_rule){
        .options = &s->options,
        .progress = steps,
        .doublings = decide_doublings(s->history.items, s->history.count - 1),
        .start_ns = decide_longest_start(s->history.items, s->history.count - 1),
        .newest = s->seen.count > 0 ? s->seen.items[0].id : (ckd_id){{0}},
        .anomalies = &s->anomalies,
        .orders = {s->options.on_hang, &s->before, s->options.grace_s, p->keeper, p->pid, NULL, 0}});
    process_end end = wait_for(s, p, a, w);
    watch_free(w);
    look_at_last_alarms(s, steps);
    progress_sum_up(a, steps, begun);
    return end;
}

static bool stop_helpers(void *context) {
    return stop_asked(context);
}

static nodes find_nodes(supervisor *s) {
    nodes n = {.options = &s->options,
               .mask = &s->before,
               .stop = stop_helpers,
               .stop_context = s,
               .history = s->history.items,
               .count = s->history.count};
    nodes_prepare(&n);
    return n;
}

/* A run without a checkpoint may be a new one; or somebody has deleted its checkpoints, or renamed it. */
static void say_start(const supervisor *s, const attempt *a) {
    if (a->from[0]) {
        supervise_say(&s->options, "attempt %" PRIu64 " starts from %s", a->number, a->from);
    } else if (a->reached == SUPERVISE_NO_STEP) {
        supervise_say(&s->options, "attempt %" PRIu64 " starts without a checkpoint", a->number);
    } else {
        supervise_say(&s->options,
                      "attempt %" PRIu64 " starts without a checkpoint: training had reached step %" PRIu64
                      ", but the store has none of run '%s'",
                      a->number, a->reached, s->options.run);
    }
}

static ckd_status run_command(supervisor *s, attempt *a, ckd_error *err) {
    process p;
    progress steps;
    set_environment(s, a);
    anomalies_begin(&s->anomalies, &s->options, &s->before, &s->seen);
    progress_make(&steps);
    ckd_status status = process_start(&p, &s->options, &s->before, err);
    if (status != CKD_OK) {
        progress_free(&steps);
        return status;
    }
    a->pid = p.pid;
    status = journal_start(&s->journal, a, s->options.command, err);
    THEN(status, process_go(&p, err));
    if (status == CKD_OK) {
        say_start(s, a);
        process_end end = attend(s, &p, a, &steps);
        a->end = end.end;
        a->code = end.code;
        a->end_ns = supervise_now();
        decide_reason(a->reason, a);
    }
    if (a->end == ATTEMPT_REFUSED) {
        snprintf(a->reason, sizeof(a->reason), "cannot start '%.150s': %s", s->options.command[0],
                 strerror(a->code));
    }
    process_close(&p);
    progress_free(&steps);
    return status;
}

/* -------------------------------------------------------------------------------------------------- in between */

/* Is there too little room for another checkpoint as large as the last one? */
static bool is_disk_full(const supervisor *s) {
    struct statvfs disk;
    if (statvfs(s->store, &disk) != 0) {
        return false;
    }
    uint64_t needed = s->seen.count > 0 ? s->seen.items[0].stored_bytes : 0;
    return (uint64_t)disk.f_bavail * disk.f_frsize < needed + FREE_MIN;
}

static double draw(void) {
    uint32_t bits = 0;
    return getrandom(&bits, sizeof(bits), GRND_NONBLOCK) == sizeof(bits) ? (double)bits / (double)UINT32_MAX
                                                                         : 0.5;
}

/* Earlier signals have ended the command. A signal that comes now also ends the wait. */
static bool signal_comes(void *context) {
    bool comes = false;
    for (int number; (number = next_signal(context)) != 0;) {
        comes |= number != SIGUSR1;
    }
    return comes;
}

static void await_agent(supervisor *s) {
    uint64_t limit_s = s->stopped_by ? s->options.grace_s : AGENT_NO_LIMIT_S;
    agent_await(&s->options, &s->before, limit_s, signal_comes, s);
}

static ckd_status choose(supervisor *s, ckd_error *err) {
    size_t count = s->history.count;
    const attempt *current = decide_current(s->history.items, &count);
    bool rewinds = s->options.on_anomaly == SUPERVISE_ANOMALY_REWIND;
    candidates_rule rule = {.options = &s->options,
                            .history = current,
                            .count = count,
                            .before = rewinds ? decide_anomaly(current, count) : NULL,
                            .alarmed = rewinds ? decide_alarm(current, count) : NULL,
                            .on_progress = cancel_if_stopped,
                            .progress_context = s};
    candidates now;
    ckd_status status = candidates_read(&now, s->store, s->options.run, err);
    if (status != CKD_OK) {
        return status;
    }
    candidates_free(&s->seen);
    s->seen = now;
    return candidates_choose(&s->seen, &rule, err);
}

/* A file server that does not answer for a while must not end the supervisor. */
#define TRIES 5
static ckd_status choose_patiently(supervisor *s, ckd_error *err) {
    ckd_status status = choose(s, err);
    for (int i = 1; i < TRIES && (status == CKD_E_IO || status == CKD_E_BUSY) && !s->stopped_by; i++) {
        supervise_say(&s->options, "cannot look for a checkpoint: %.300s; trying again", err->message);
        pause_for(s, (double)s->options.pause_s * i);
        status = choose(s, err);
    }
    return status;
}

/* Records the anomaly of the attempt, whether it was seen before the attempt ended or only then. */
static void record_anomaly(supervisor *s, attempt *a) {
    anomalies_finish(&s->anomalies, stop_helpers, s);
    snprintf(a->anomaly, sizeof(a->anomaly), "%s", s->anomalies.first);
    snprintf(a->alarm, sizeof(a->alarm), "%s", s->anomalies.alarm);
    a->alarms = s->anomalies.alarms;
    a->alarm_step = s->anomalies.alarms ? s->anomalies.alarm_step : SUPERVISE_NO_STEP;
    a->alarm_acts = s->anomalies.alarm_acts;
    a->unhealthy = anomalies_end_attempt(&s->anomalies) && !a->stopped_by;
    if (a->unhealthy) {
        decide_reason(a->reason, a);
    }
}

/* Called when the attempt has ended. It is the last one of the history. */
static ckd_status conclude(supervisor *s, decision *d, nodes *n, ckd_error *err) {
    const decide_rules rules = {s->options.pause_s, s->options.max_pause_s, s->options.max_restarts,
                                s->options.max_futile, s->options.on_anomaly == SUPERVISE_ANOMALY_STOP};
    attempt *a = last_attempt(s);
    bool older = false;
    await_agent(s);
    take_stock(s, a, &s->seen, &older);
    record_anomaly(s, a);
    n->history = s->history.items;
    n->count = s->history.count;
    nodes_blame(n, a);
    *d = decide(&rules, &(decide_facts){.history = s->history.items,
                                        .count = s->history.count,
                                        .started_here = s->started_here,
                                        .older = older,
                                        .disk_full = is_disk_full(s),
                                        .elsewhere = !s->options.hosts_file && requeue_possible(),
                                        .chance = draw()});
    a->status = d->restart ? -1 : d->status;
    if (d->restart) {
        snprintf(a->verdict, sizeof(a->verdict), "restarts in %.1f s", d->pause_s);
    } else {
        snprintf(a->verdict, sizeof(a->verdict), "%s", d->reason);
    }
    supervise_say(&s->options, "attempt %" PRIu64 " ended: %s%s%s", a->number, a->reason,
                  d->restart ? "; " : "", d->restart ? a->verdict : "");
    return journal_end(&s->journal, a, err);
}

static ckd_status one_attempt(supervisor *s, decision *d, ckd_error *err) {
    await_agent(s);
    ckd_status status = choose_patiently(s, err);
    nodes n = {0};
    if (status == CKD_OK && !s->stopped_by) {
        devices_settle(&s->devices, s->started_here > 0);
    }
    if (status == CKD_OK && !s->stopped_by) {
        n = find_nodes(s);
    }
    if (!s->stopped_by) {
        THEN(status, add_attempt(s, err));
        if (status == CKD_OK) {
            nodes_record(last_attempt(s), &n);
        }
        THEN(status, run_command(s, last_attempt(s), err));
        s->started_here += status == CKD_OK;
        THEN(status, conclude(s, d, &n, err));
    } else {
        status = CKD_OK;
    }
    nodes_free(&n);
    return status;
}

static ckd_status loop(supervisor *s, supervise_result *out, ckd_error *err) {
    decision d = {.restart = true};
    ckd_status status = CKD_OK;
    while (status == CKD_OK && d.restart && !stop_asked(s)) {
        status = one_attempt(s, &d, err);
        if (status == CKD_OK && d.restart) {
            pause_for(s, d.pause_s);
        }
    }
    if (status == CKD_OK && d.restart) { /* stopped between attempts */
        d = decide_stopped(s->stopped_by);
    }
    out->status = d.status;
    out->requeue = d.requeue;
    out->kind = d.kind;
    out->attempts = s->started_here;
    snprintf(out->reason, sizeof(out->reason), "%s", d.reason);
    return status;
}

/* -------------------------------------------------------------------------------------------------------- begin */

static ckd_status open_all(supervisor *s, ckd_error *err) {
    ckd_store *store;
    if (strncmp(s->options.store, "s3://", 5) == 0) {
        return supervise_error(
            err, CKD_E_UNSUPPORTED,
            "'ckptdelta run' keeps its journal in the store's directory, and %s has none: give it a "
            "directory, and copy its checkpoints with 'ckptdelta push'",
            s->options.store);
    }
    ckd_status status = ckd_store_open(&store, s->options.store, CKD_OPEN_CREATE, NULL, err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_store_close(store);
    char *path = realpath(s->options.store, NULL);
    if (!path || strlen(path) >= sizeof(s->store)) {
        free(path);
        return supervise_error_sys(err, path ? ENAMETOOLONG : errno, "cannot find %s", s->options.store);
    }
    snprintf(s->store, sizeof(s->store), "%s", path);
    s->options.store = s->store;
    free(path);
    status = journal_open(&s->journal, &s->options, err);
    THEN(status, supervise_attempts(&s->history, s->store, s->options.run, err));
    THEN(status, close_unfinished(s, err));
    return status;
}

ckd_status supervise_run(supervise_result *out, const supervise_options *options, ckd_error *err) {
    supervisor s = {.options = *options,
                    .journal.fd = -1,
                    .seen.chosen = SIZE_MAX,
                    .signals = -1,
                    .anomalies.helper.out = -1};
    *out = (supervise_result){.status = 1};
    s.devices = (devices){.options = &s.options, .mask = &s.before, .stop = stop_helpers, .stop_context = &s};
    ckd_status status = take_signals(&s, err);
    THEN(status, open_all(&s, err));
    THEN(status, loop(&s, out, err));
    candidates now;
    if (status == CKD_OK && look_again(&now, &s)) {
        if (now.count > 0) {
            candidate_ref(out->newest, &now.items[0]);
        }
        candidates_free(&now);
    }
    char *command = status == CKD_OK && out->requeue
                        ? requeue_command(s.history.items, s.history.count, &s.before)
                        : NULL;
    out->requeue = command != NULL;
    anomalies_finish(&s.anomalies, stop_helpers, &s);
    candidates_free(&s.seen);
    devices_free(&s.devices);
    supervise_attempts_free(&s.history);
    journal_close(&s.journal);
    if (command) {
        requeue(&s.options, command, &s.before);
    }
    free(command);
    if (s.signals >= 0) {
        close(s.signals);
    }
    return status;
}
