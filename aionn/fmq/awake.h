/* How long an end may stay awake before it sleeps: the rule of aionn/burst/spin_policy.py, for one end of one burst.
 * Plain C11 without Python. `SpinPolicy` in Python is the oracle of tests/burst/test_spin_policy.py. */
#ifndef AIONN_FMQ_AWAKE_H
#define AIONN_FMQ_AWAKE_H

#include <stdbool.h>
#include <stdint.h>

#define AWAKE_PROBE_EVERY 64u /* PROBE_EVERY in spin_policy.py */
#define AWAKE_WEIGHT 0.125    /* _WEIGHT there */

struct awake {
    double average_ns;
    long long window_ns;
    unsigned waits;
    bool allowed, brisk; /* not allowed: every budget is 0 */
};

/* Return how long to look before arming, for a wait that begins now and a peer on another CPU. */
static inline int64_t awake_budget(struct awake *a)
{
    if (a->brisk)
        return a->window_ns;
    return a->allowed && ++a->waits % AWAKE_PROBE_EVERY == 0 ? 2 * a->window_ns : 0;
}

/* Note how long a wait took, and whether this end slept in it. */
static inline void awake_waited(struct awake *a, int64_t ns, bool slept)
{
    double window = (double)a->window_ns, took = (double)ns < 4 * window ? (double)ns : 4 * window;
    if (!slept && took <= window && window < a->average_ns)
        a->average_ns = window;
    a->average_ns += AWAKE_WEIGHT * (took - a->average_ns);
    a->brisk = a->allowed && a->average_ns <= window;
}

#endif
