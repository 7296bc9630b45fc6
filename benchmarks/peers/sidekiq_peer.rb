# Sidekiq: the verbs of verbs.py, and the job of job_run.py.
# Fast: 5 threads (the default since Sidekiq 7), the hiredis driver; `bulk` is push_bulk. `work` runs Sidekiq's own command line with this file as the application.

require 'sidekiq'

SERVER = { url: "unix://#{ENV.fetch('BENCH_SOCKET')}", driver: :hiredis }.freeze
Sidekiq.configure_client { |config| config.redis = SERVER }
Sidekiq.configure_server { |config| config.redis = SERVER }
Sidekiq.logger.level = Logger::ERROR
BLOCK = Integer(ENV.fetch('BENCH_BLOCK', '1'))

def now_ns
  Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond)
end

class NoopJob
  include Sidekiq::Worker
  sidekiq_options queue: 'bench'
  @@lock = Mutex.new
  @@count = 0

  def self.write(sent)
    @@file ||= File.open(ENV.fetch('BENCH_TRACE'), 'a').tap { |file| file.sync = true }
    @@file.syswrite("#{now_ns} #{sent} #{Process.pid}\n")
  end

  def perform(argument)
    unless argument.key?('at')
      count = @@lock.synchronize { @@count += 1 }
      NoopJob.write(0) if (count % BLOCK).zero?
      return
    end
    NoopJob.write(argument['at'])
    sleep(argument['ms'] / 1000.0) if argument.key?('ms')
  end
end

def one(seconds, most)
  20.times { |n| NoopJob.perform_async({ 'n' => n }) }
  began = now_ns
  count = 0
  while count < most && (now_ns - began) / 1e9 < seconds
    NoopJob.perform_async({ 'n' => count })
    count += 1
  end
  puts "#{count} #{(now_ns - began) / 1e9}"
end

def bulk(count)
  began = now_ns
  (0...count).each_slice(1000) do |numbers|
    Sidekiq::Client.push_bulk('class' => NoopJob, 'args' => numbers.map { |n| [{ 'n' => n }] })
  end
  puts "#{count} #{(now_ns - began) / 1e9}"
end

def arrivals(file, ms)
  times = File.readlines(file).map(&:to_i)
  began = now_ns
  times.each_with_index do |offset, n|
    ahead = began + offset - now_ns
    sleep(ahead / 1e9) if ahead.positive?
    argument = { 'n' => n, 'at' => began + offset }
    argument['ms'] = ms if ms.positive?
    NoopJob.perform_async(argument)
  end
end

def work
  require 'sidekiq/cli'
  threads = ENV.fetch('BENCH_CONCURRENCY', '0')
  cli = Sidekiq::CLI.instance
  cli.parse(['-r', __FILE__, '-q', 'bench', '-c', threads == '0' ? '5' : threads, '-e', 'production'])
  cli.run
end

if $PROGRAM_NAME == __FILE__ && ARGV.any?
  verb, *rest = ARGV
  case verb
  when 'one' then one(rest[0].to_f, rest[1].to_i)
  when 'bulk' then bulk(rest[0].to_i)
  when 'arrivals' then arrivals(rest[0], rest[1].to_f)
  when 'work' then work
  end
end
