/* rhythm.h with invented streams. Each scenario drives it as a lane does, and prints what came of it: frames, warm runs, frames that
 * were foreseen, frames that came before their warm run was over, warm runs in the second half, the lead in us, the time spent in
 * thousandths. */
#include "harness.h"
#include "rhythm.h"

#define PERIOD INT64_C(32000000)
#define PLAIN INT64_C(600000)
#define HOT INT64_C(200000)

struct stream {
    const char *name;
    int64_t period_ns, noise_ns, plain_ns, hot_ns, timer_ns, pause_ns, drift_ns; /* drift: the period grows by so much per frame */
    unsigned pause_every, lost_at;
    bool asked, announced;
};

static const struct stream STREAMS[] = {
    {"steady", PERIOD, 100000, PLAIN, HOT, 60000, 0, 0, 0, 0, true, false},
    {"not asked for", PERIOD, 100000, PLAIN, HOT, 60000, 0, 0, 0, 0, false, false},
    {"late timers", PERIOD, 100000, PLAIN, HOT, 900000, 0, 0, 0, 0, true, false},
    {"jitter", PERIOD, PERIOD / 5, PLAIN, HOT, 60000, 0, 0, 0, 0, true, false},
    {"pauses", PERIOD, 100000, PLAIN, HOT, 60000, 500000000, 0, 16, 0, true, false},
    {"drift", PERIOD, 100000, PLAIN, HOT, 60000, 0, 20000, 0, 0, true, false},
    {"lost", PERIOD, 100000, PLAIN, HOT, 60000, 0, 0, 0, 500, true, false},
    {"another rate", PERIOD, 100000, PLAIN, HOT, 60000, 3 * PERIOD, 0, 1, 0, true, false},
    {"no gain", PERIOD, 100000, PLAIN, PLAIN, 60000, 0, 0, 0, 0, true, false},
    {"long runs", 8 * PERIOD, 100000, 9000000, 6000000, 60000, 0, 0, 0, 0, true, false},
    {"too dear", 4000000, 50000, PLAIN, HOT, 60000, 0, 0, 0, 0, true, false},
    {"announced", PERIOD, PERIOD / 5, PLAIN, HOT, 60000, 0, 0, 0, 0, true, true},
    {"announced too early", PERIOD, PERIOD / 5, PLAIN, HOT, 60000, 0, 0, 0, 0, true, true},
};

static int64_t either(uint64_t *state, int64_t most) { return most ? (int64_t)(random_next(state) % (uint64_t)(2 * most)) - most : 0; }

int main(int count, char **arguments)
{
    MUST(count == 3);
    const struct stream *s = NULL;
    for (unsigned i = 0; i < sizeof STREAMS / sizeof *STREAMS; i++)
        if (!strcmp(STREAMS[i].name, arguments[1]))
            s = &STREAMS[i];
    MUST(s);
    unsigned frames = (unsigned)atoi(arguments[2]), warm = 0, early = 0, late_half = 0;
    bool too_early = !strcmp(s->name, "announced too early");
    uint64_t state = 20261122;
    int64_t now = 1000000000, spent = 0, began = now, due = now;
    struct rhythm r;
    rhythm_begin(&r, s->asked);
    for (unsigned frame = 0; frame < frames; frame++) {
        bool pause = s->pause_every && frame && frame % s->pause_every == 0, lost = s->lost_at && frame >= s->lost_at;
        due += s->period_ns + s->drift_ns * frame + (pause ? s->pause_ns : 0);
        int64_t arrives = due + either(&state, lost ? s->period_ns / 3 : s->noise_ns);
        int64_t wake = rhythm_wake_ns(&r, now);
        MUST(s->asked || !wake);
        bool announced = s->announced && arrives - 1200000 > now && rhythm_announce(&r);
        if (announced)
            wake = arrives - (too_early ? 12000000 : 1200000);
        int64_t free_at = arrives;
        if (wake && wake + s->timer_ns < arrives) {
            int64_t from = wake + (announced ? 0 : s->timer_ns), until = from + s->plain_ns;
            MUST(from > now);
            rhythm_warm(&r, from);
            rhythm_warmed(&r, from, until, arrives <= until);
            warm++;
            early += arrives <= until;
            late_half += frame >= frames / 2;
            int64_t budget = rhythm_look_ns(&r, until);
            MUST(budget >= 0 && budget <= RHYTHM_LOOK_NS && (arrives > until || !budget));
            MUST(!rhythm_wake_ns(&r, until) && !rhythm_announce(&r));
            int64_t looked = arrives < until + budget ? arrives - until : budget;
            if (arrives > until)
                rhythm_looked(&r, looked);
            spent += s->plain_ns + (arrives > until ? looked : 0);
            free_at = arrives > until ? arrives : until;
        }
        now = free_at;
        rhythm_arrived(&r, now);
        MUST(r.lead_ns <= RHYTHM_MOST_LEAD_NS && (!r.due_ns || r.lead_ns >= RHYTHM_LEAST_LEAD_NS));
        int64_t service = r.cold ? s->plain_ns : s->hot_ns;
        now += service;
        rhythm_served(&r, service);
    }
    printf("%u %u %u %u %u %lld %lld\n", r.frames, warm, r.foreseen, early, late_half, (long long)r.lead_ns / 1000,
           (long long)(spent * 1000 / (now - began)));
    return 0;
}
